"""Orchard: the recording layer between AI agents and the models that run inside them."""
