"""What only this repository needs: `make bench`, a rented GPU's minutes, and the tables of its pages."""
