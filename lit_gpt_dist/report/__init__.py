"""Turns result lines into tables, verdicts on loss curves, pictures and one page. Trains nothing."""
