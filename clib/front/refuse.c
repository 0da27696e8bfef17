/*
 * Symbols of libibverbs.so.1 that this device does not support: enhanced
 * connection establishment, completion counters. Verbs that are called
 * through a context's table (flows, work queues, counters) have no entry there: verbs.h
 * itself refuses them.
 */
#include "refuse.h"

REFUSE_ERRNO(ibv_query_ece)
REFUSE_ERRNO(ibv_set_ece)
REFUSE_ERRNO(_ibv_query_comp_cntr_caps)
REFUSE_POINTER(ibv_create_comp_cntr)
REFUSE_ERRNO(ibv_destroy_comp_cntr)
REFUSE_ERRNO(ibv_inc_comp_cntr)
REFUSE_ERRNO(ibv_inc_err_comp_cntr)
REFUSE_ERRNO(ibv_qp_attach_comp_cntr)
REFUSE_ERRNO(ibv_read_comp_cntr)
REFUSE_ERRNO(ibv_read_err_comp_cntr)
REFUSE_ERRNO(ibv_set_comp_cntr)
REFUSE_ERRNO(ibv_set_err_comp_cntr)
REFUSE_ERRNO(ibv_resolve_eth_l2_from_gid)

/* For providers, the user-space halves of kernel drivers: there are none here. */
REFUSE_VOID(ibv_register_driver)
