"""What tests of whole runs are built from: ranks, trainings, and commands as a user types them."""
