"""The receivers of this process.

Each device has one receiver thread, which drains its source, decodes, and calls the sinks in order. A receiver is
never stopped while the process lives: a scope (`outfeed_receiver`) begins and ends with END_OF_STREAM frames in the
stream of the device, so messages before and after it are told apart without stopping the thread.
"""
