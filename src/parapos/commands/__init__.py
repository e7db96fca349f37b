"""Groups of commands of the command line. Each adds its own to the parser, and does its work elsewhere."""
