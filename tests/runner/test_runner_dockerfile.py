import pytest

from orchard_proxy.runner import dockerfile
from orchard_proxy.runner.dockerfile import Copy


def test_what_means_something_without_building():
    recipe = dockerfile.read(
        """
# syntax=docker/dockerfile:1
ARG TAG=12
FROM debian:$TAG-slim
ARG WHERE=/app
ENV A=1 B="two words" PATH=/opt/bin:$PATH
ENV LEGACY some value
WORKDIR ${WHERE}
WORKDIR src
COPY --chown=1000:1000 a.py b.py ./
COPY ["with blank.txt", "/data/x.txt"]
ADD data /srv/data/
RUN mkdir -p /app/src /srv
EXPOSE 80
CMD ["sleep", "infinity"]
"""
    )
    assert recipe.workdir == "/app/src"
    assert recipe.env == {"A": "1", "B": "two words", "PATH": "/opt/bin:", "LEGACY": "some value"}
    assert recipe.copies == [
        Copy(sources=["a.py", "b.py"], target="/app/src/"),
        Copy(sources=["with blank.txt"], target="/data/x.txt"),
        Copy(sources=["data"], target="/srv/data/"),
    ]
    assert recipe.unbuilt == []


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (
            "RUN apt-get update && \\\n    # why\n    apt-get install -y git",
            "RUN apt-get update && apt-get install -y git",
        ),
        ("COPY --from=builder /x /y", "COPY --from=builder /x /y"),
        ("ADD https://example.org/x.tar /x", "ADD https://example.org/x.tar /x"),
        ("HEALTHCHECK CMD true", "HEALTHCHECK CMD true"),
        ("RUN <<EOF\nWORKDIR /not-this\nEOF", "RUN <<EOF"),
    ],
)
def test_what_would_need_a_build_is_named(line, named):
    recipe = dockerfile.read(f"FROM debian\n{line}\n")
    assert recipe.unbuilt == [named]
    assert recipe.workdir is None


def test_only_the_last_stage_counts():
    recipe = dockerfile.read("FROM golang AS build\nWORKDIR /src\nRUN make\nFROM debian\nWORKDIR /app\n")
    assert (recipe.workdir, recipe.unbuilt) == ("/app", [])


@pytest.mark.parametrize("target", [".", "./", "sub/"])
def test_a_folder_as_target(target):
    (copy,) = dockerfile.read(f"FROM x\nWORKDIR /w\nCOPY f {target}").copies
    assert copy.target == ("/w/sub/" if target == "sub/" else "/w/")
