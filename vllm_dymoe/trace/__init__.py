"""Traces of routing."""
