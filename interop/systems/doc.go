// Package systems runs systems that others wrote on the drop-in libibverbs, unmodified: Open MPI and MPICH over UCX,
// OpenSHMEM, uDAPL. docs/works-with.md has what a user types for each.
package systems
