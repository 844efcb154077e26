"""The collector: receives the streams of many processes and stores them."""
