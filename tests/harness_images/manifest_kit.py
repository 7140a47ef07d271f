"""Manifests for the tests of harness_images."""

from orchard_proxy.schema.launch import LaunchRequest

GOOD = """
name = "my-agent"
version = "1.0"
dialects = ["chat"]
[launch]
command = ["agent", "{prompt}"]
"""

REQUEST = LaunchRequest(
    prompt="Say {api_key} and it's done",
    model="tiny",
    base_url="http://127.0.0.1:8080/v1",
    api_key="key-1",
    workdir="/workspace",
    home="/home/agent",
    timeout_s=60,
)


def manifest_with(head: str = "", *, launch: str = 'command = ["agent", "{prompt}"]', rest: str = "") -> str:
    return f'name = "my-agent"\nversion = "1.0"\ndialects = ["chat"]\n{head}\n[launch]\n{launch}\n{rest}\n'
