/*
 * Signals; see vb_guard_signals.
 */
#include "front.h"

void vb_guard_signals(void) {}
