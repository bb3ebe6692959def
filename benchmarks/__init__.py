"""Yardsticks for the application's speed: the same work in a plain loop, in a Fabric loop, and without the Trainer."""
