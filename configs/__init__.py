"""Recipes and the demo's files; an installed wheel has this folder as `dflash_configs`."""
