"""Messages between two programs: connect, listen, Connection."""
