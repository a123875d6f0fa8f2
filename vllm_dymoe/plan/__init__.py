"""Predicts how a model performs on a device, before anything is downloaded.

It needs the model's config.json and data sheets only.
"""
