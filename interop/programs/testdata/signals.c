/*
 * Signals that the program blocks after its first verb, to receive them with sigwait and
 * signalfd. The library's threads must not receive them.
 */
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "self.h"

enum { ROUNDS = 50 };

int main(void)
{
	struct self s = connect_self();
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGUSR1);
	WANT(!pthread_sigmask(SIG_BLOCK, &set, NULL));
	int fd = signalfd(-1, &set, 0);
	WANT(fd >= 0);
	for (int i = 0; i < ROUNDS; i++) {
		int got;
		WANT(!kill(getpid(), SIGTERM)); /* to the process: any thread that has not blocked it */
		WANT(!sigwait(&set, &got) && got == SIGTERM);
		struct pollfd p = {fd, POLLIN, 0};
		struct signalfd_siginfo info;
		WANT(!kill(getpid(), SIGUSR1));
		WANT(poll(&p, 1, 10000) == 1 && read(fd, &info, sizeof info) == sizeof info && info.ssi_signo == SIGUSR1);
	}
	close(fd);
	close_self(&s);
	puts("ok");
	return 0;
}
