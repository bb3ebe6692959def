"""What a run needs and takes, before it is paid for: numbers in, numbers out. Imports neither torch nor lightning."""
