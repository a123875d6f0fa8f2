"""Predicts how a model performs on a device, from its config.json and data sheets, before anything is downloaded."""
