#ifndef VERBENA_APPEND_H
#define VERBENA_APPEND_H

/* vb_open_appended returns a descriptor, for reading, of what is left of a file, and of the lines of a
 * text that the file does not have; -1 with errno if it cannot. from is -1 if there is no file. flags
 * are those of open. */
int vb_open_appended(int from, const char *text, int flags);

/* vb_open_replaced returns a descriptor of what is left of a file, with the second line of a text wherever the first one
 * occurs; -1 with errno if it cannot. */
int vb_open_replaced(int from, const char *text, int flags);

#endif
