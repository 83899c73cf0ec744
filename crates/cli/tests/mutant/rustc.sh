#!/bin/sh
# What cargo runs in rustc's place for the crates of the workspace, and for no other.
exec "$@" --cfg 'ringfence_mutant="no-invalidation"'
