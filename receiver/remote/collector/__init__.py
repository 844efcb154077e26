"""The collector: takes the streams of many processes and stores them."""
