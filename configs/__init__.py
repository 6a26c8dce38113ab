"""Recipes and the demo's files; in an installed wheel this folder is the package `dflash_configs`."""
