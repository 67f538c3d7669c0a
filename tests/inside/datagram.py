"""Private parts of aiordma/datagram/ that tests ask for."""
