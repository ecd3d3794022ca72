"""How the bundled models were made; not part of the installed package."""
