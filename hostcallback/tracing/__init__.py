"""What is noted of a tap while a program is traced: its place, its leaves, what it keeps."""
