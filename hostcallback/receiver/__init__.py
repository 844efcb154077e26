"""The host side of hostcallback: everything after a message has left the device. Runs without JAX.

`hostcallback.receiver.replay` delivers the messages of a tap log once more, and `hostcallback.receiver.LogReader` reads
them. A sink is a function of one `hostcallback.receiver.Message`.
"""

from typing import TYPE_CHECKING

from hostcallback.receiver.public_names import PublicNames

if __name__ == "receiver":
    raise ImportError("this folder is the package hostcallback.receiver: import that one", name=__name__)

_names = PublicNames(
    __name__,
    renamed={"otlp_exporter": "otlp"},
    removed=dict.fromkeys(
        ("JsonlWriter", "MetricWriter", "metrics"),
        "send values with hcb.metrics and write them with writers=[hcb.jsonl(file)] of outfeed_receiver; `hcb replay "
        "--metrics FILE` writes the scalars of a log",
    ),
)

if not TYPE_CHECKING:  # else a name that does not exist would be one of type Any
    __getattr__ = _names.load

__dir__ = _names.listed
