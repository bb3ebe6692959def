"""Measures a matrix of training configurations, each in a fresh process, and searches for the fastest and the largest."""
