"""The recording proxy: identify, relay, control plane, probes."""
