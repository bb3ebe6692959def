"""What this machine is, what will not work on it, and how fast it is when measured."""
