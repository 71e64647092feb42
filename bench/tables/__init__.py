"""The tables of this repository's pages: declarations of rows and columns, and how they come into the pages."""
