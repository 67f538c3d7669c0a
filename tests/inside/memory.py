"""Private parts of aiordma/memory/ that tests ask for."""
