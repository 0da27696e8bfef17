/*
 * Which handler gets a fault. The backend reads and writes the program's memory. If that
 * is not mapped, the handler that Go has installed turns the fault into a completion with
 * an error. A program that installs a handler later replaces Go's, and would get the
 * backend's faults.
 *
 *  1. When the backend is loaded, vb_start_guard notes its handlers and where its code
 *     lies. Go calls handlers that were installed before for faults outside Go.
 *  2. Verbs that take long anyway, and now and then a poll, call vb_guard_signals. If
 *     another handler was installed since, it installs dispatch in its place.
 *  3. dispatch looks where the fault happened: in the backend's code it calls Go's
 *     handler, anywhere else the program's.
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
static struct sigaction backends[NUM];			 /* what Go has installed */
static struct sigaction programs[NUM];			 /* what the program has installed later */
static uintptr_t from, to;				 /* the backend's code */

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
	const struct sigaction *a = pc >= from && pc < to ? &backends[i] : &programs[i];
	if (a->sa_flags & SA_SIGINFO)
		a->sa_sigaction(sig, info, context);
	else if (a->sa_handler == SIG_DFL || a->sa_handler == SIG_IGN) {
		signal(sig, SIG_DFL); /* the instruction is repeated, and ends the process */
	} else
		a->sa_handler(sig);
}

/* find notes the executable segment of a loaded file that contains an address. */
static int find(struct dl_phdr_info *lib, size_t size, void *in_backend)
{
	(void)size;
	for (int i = 0; i < lib->dlpi_phnum; i++) {
		const ElfW(Phdr) *p = &lib->dlpi_phdr[i];
		uintptr_t start = lib->dlpi_addr + p->p_vaddr;
		if (p->p_type == PT_LOAD && p->p_flags & PF_X && (uintptr_t)in_backend - start < p->p_memsz) {
			from = start;
			to = start + p->p_memsz;
			return 1;
		}
	}
	return 0;
}

void vb_start_guard(void *in_backend)
{
	pthread_mutex_lock(&lock);
	dl_iterate_phdr(find, in_backend);
	for (int i = 0; i < NUM; i++)
		sigaction(signals[i], NULL, &backends[i]);
	pthread_mutex_unlock(&lock);
}

void vb_guard_signals(void)
{
	if (!to || pthread_mutex_trylock(&lock))
		return;
	for (int i = 0; i < NUM; i++) {
		struct sigaction now;
		if (sigaction(signals[i], NULL, &now) || now.sa_sigaction == dispatch ||
		    now.sa_sigaction == backends[i].sa_sigaction)
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
	/* The parent's backend is dead here: no thread runs its code. vb_start_guard notes
	 * the next one. */
	for (int i = 0; i < NUM && to; i++) {
		struct sigaction now;
		if (!sigaction(signals[i], NULL, &now) && now.sa_sigaction == dispatch)
			sigaction(signals[i], &programs[i], NULL);
	}
	from = to = 0;
}

__attribute__((constructor)) static void at_load(void) { pthread_atfork(NULL, NULL, after_fork_in_child); }
