"""Trainers. Empty until the training loop lands."""
