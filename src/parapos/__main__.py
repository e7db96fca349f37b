"""`python -m parapos` is the command `parapos`."""

import sys

from .cli import main

sys.exit(main())
