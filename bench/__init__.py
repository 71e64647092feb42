"""What no run needs: `make bench`, a rented GPU's minutes, comparing and sweeping runs, and the tables of the pages."""
