"""The public names, once: as in `hostcallback/__init__.pyi`."""

from hostcallback.receiver.capsule.file_format import CapsuleError as CapsuleError
from hostcallback.receiver.capsule.reading import Capsule as Capsule
from hostcallback.receiver.messages import Message as Message, Sink as Sink
from hostcallback.receiver.remote.otlp.exporter import otlp as otlp
from hostcallback.receiver.replayer.replay import replay as replay
from hostcallback.receiver.taplog.reading.reader import LogReader as LogReader
from hostcallback.receiver.taplog.reading.selection import Selection as Selection
from hostcallback.receiver.wire.pytree import Node as Node, Opaque as Opaque
