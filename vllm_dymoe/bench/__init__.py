"""Measures policies, budgets and batches side by side on one model.

The results are arranged as in the papers' tables.
"""
