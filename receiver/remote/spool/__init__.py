"""The spool: a tap log that is read behind the writing, and what dead processes left in theirs."""
