"""Sandboxes: isolated places for programs that are not trusted, behind the Protocols of `orchard_proxy.schema.sandbox`."""
