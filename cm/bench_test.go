package cm

import (
	"context"
	"fmt"
	"testing"

	"github.com/verbena-rdma/verbena/verbs"
)

// BenchmarkDial makes a connection and ends it: queue pairs, messages, and all that is closed again.
func BenchmarkDial(b *testing.B) {
	for _, link := range []verbs.LinkMode{verbs.LinkLocal, verbs.LinkUDP} {
		b.Run(fmt.Sprint(link), func(b *testing.B) {
			server, client := device(b, link), device(b, link)
			small := verbs.QPCap{MaxSendWR: 1, MaxRecvWR: 1}
			l := listenOn(b, anyPort(server), &Config{Device: server, Cap: small})
			at := l.Addr().String()
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				for {
					c, err := l.Accept(context.Background())
					if err != nil {
						return
					}
					<-c.Done()
					closeAll(b, c)
				}
			}()
			for b.Loop() {
				c, err := Dial(context.Background(), at, &Config{Device: client, Cap: small})
				check(b, err)
				closeAll(b, c)
			}
			closeAll(b, l)
			<-ended
		})
	}
}
