"""Sandboxes: isolated places for untrusted programs, behind the Protocols of `orchard_proxy.schema.sandbox`."""
