"""Experts: formats, encodings and the byte layout of packed experts."""
