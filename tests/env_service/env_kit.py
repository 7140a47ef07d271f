"""Marks of the sandbox tests."""

import os

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has cgroups and uids to give")
