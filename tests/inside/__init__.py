"""What tests look at inside the library, by its private names: here, and each once.

A test asks by these functions, so that a change inside the library changes one line here: there is
a file for each folder of aiordma/.
"""
