"""Other projects' call contracts, kept by our kernels: docs/integrations.md says what is here."""
