"""What the project is built, checked and measured with; no part of the packages."""
