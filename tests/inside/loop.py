"""Private parts of aiordma/loop/ that tests ask for."""
