"""The collector: receives the streams of many processes and stores them.

An asyncio server checks each slice, appends it to the files of its stream, and acknowledges it. A different thread
reads the files and delivers to consumers (`hostcallback.receiver.remote.delivery`). A client is not trusted: sizes,
names and segments are checked before they are used.
"""
