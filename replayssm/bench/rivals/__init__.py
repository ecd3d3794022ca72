"""Other projects' kernels as contenders: loaded from a folder of the user's, none of them part of this package."""
