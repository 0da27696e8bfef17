/* A shared object that is no PeerDirect client. */
int nothing(void);
int nothing(void) { return 0; }
