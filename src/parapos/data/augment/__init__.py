"""What training changes in raw samples, before they become tokens."""
