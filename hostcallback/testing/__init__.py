"""For tests of programs with taps: what the pytest plugin `hostcallback_pytest` loads when a test has used a tap.

`drain` waits for the taps of a test, `reports` shows their failures, `captured_taps` is the fixture `taps`.
"""
