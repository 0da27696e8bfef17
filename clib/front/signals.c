/*
 * Who gets a fault. The engine reads and writes the program's memory; if that is
 * not there, the fault becomes a completion with an error, by way of the handler
 * that Go has installed. A program that installs a handler of its own afterwards
 * takes that away, and would be told of faults that are not its own.
 *
 *  1. When the engine is loaded, its handlers and where its code lies are noted.
 *     Handlers that were there before are called by Go for what is not Go's.
 *  2. Verbs that take long anyway, and now and then a poll, look whether somebody
 *     has installed another handler since; ours then goes in front of it.
 *  3. Ours asks where the fault happened: in the engine's code it is the engine's,
 *     anywhere else it is for the handler that the program wanted.
 */
#define _GNU_SOURCE
#include <link.h>
#include <signal.h>
#include <string.h>
#include <ucontext.h>

#include "front.h"

static const int signals[] = {SIGSEGV, SIGBUS};
enum { NUM = 2 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards changes of what follows */
static struct sigaction engines[NUM];			 /* what Go has installed */
static struct sigaction programs[NUM];			 /* what the program has installed later */
static uintptr_t from, to;				 /* the engine's code */

static uintptr_t where(const ucontext_t *u)
{
#if defined(__x86_64__)
	return (uintptr_t)u->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
	return (uintptr_t)u->uc_mcontext.pc;
#else
#error "where is the program counter?"
#endif
}

static void dispatch(int sig, siginfo_t *info, void *context)
{
	int i = sig == SIGSEGV ? 0 : 1;
	uintptr_t pc = where(context);
	const struct sigaction *a = pc >= from && pc < to ? &engines[i] : &programs[i];
	if (a->sa_flags & SA_SIGINFO)
		a->sa_sigaction(sig, info, context);
	else if (a->sa_handler == SIG_DFL || a->sa_handler == SIG_IGN) {
		signal(sig, SIG_DFL); /* the instruction is tried again, and ends the process */
	} else
		a->sa_handler(sig);
}

/* find notes the part of a loaded file that holds an address and can be executed. */
static int find(struct dl_phdr_info *lib, size_t size, void *in_engine)
{
	(void)size;
	for (int i = 0; i < lib->dlpi_phnum; i++) {
		const ElfW(Phdr) *p = &lib->dlpi_phdr[i];
		uintptr_t start = lib->dlpi_addr + p->p_vaddr;
		if (p->p_type == PT_LOAD && p->p_flags & PF_X && (uintptr_t)in_engine - start < p->p_memsz) {
			from = start;
			to = start + p->p_memsz;
			return 1;
		}
	}
	return 0;
}

void vb_start_guard(void *in_engine)
{
	pthread_mutex_lock(&lock);
	dl_iterate_phdr(find, in_engine);
	for (int i = 0; i < NUM; i++)
		sigaction(signals[i], NULL, &engines[i]);
	pthread_mutex_unlock(&lock);
}

void vb_guard_signals(void)
{
	if (!to || pthread_mutex_trylock(&lock))
		return;
	for (int i = 0; i < NUM; i++) {
		struct sigaction now;
		if (sigaction(signals[i], NULL, &now) || now.sa_sigaction == dispatch ||
		    now.sa_sigaction == engines[i].sa_sigaction)
			continue;
		programs[i] = now;
		struct sigaction ours = {.sa_sigaction = dispatch,
					 .sa_flags = (now.sa_flags & ~SA_RESETHAND) | SA_SIGINFO | SA_ONSTACK,
					 .sa_mask = now.sa_mask};
		sigaction(signals[i], &ours, NULL);
	}
	pthread_mutex_unlock(&lock);
}

static void after_fork_in_child(void)
{
	pthread_mutex_init(&lock, NULL);
	/* The engine of the parent is dead here: nobody runs its code any more. The
	 * next one is noted when it is loaded. */
	for (int i = 0; i < NUM && to; i++) {
		struct sigaction now;
		if (!sigaction(signals[i], NULL, &now) && now.sa_sigaction == dispatch)
			sigaction(signals[i], &programs[i], NULL);
	}
	from = to = 0;
}

__attribute__((constructor)) static void at_load(void) { pthread_atfork(NULL, NULL, after_fork_in_child); }
