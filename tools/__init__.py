"""Tools that build, check and measure the project; not a part of the packages."""
